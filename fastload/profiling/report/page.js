const button = document.getElementById("save");
button.hidden = false;
button.addEventListener("click", () => {
  const text = document.getElementById("data").textContent;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "fastload-report.json";
  link.click();
});
