/* Fails or records the calls by which a process reads and changes files below one folder. For LD_PRELOAD, Linux.

   The file named by FAULTS_CONTROL says what to do; it is read when a process starts, and in the child after a fork:

       below FOLDER            calls about other files are left alone
       fail KIND N ERRNO MANY  the Nth call of a kind in this process fails with ERRNO, as do MANY - 1 calls behind it;
                               ERRNO -1: it reads or writes half of what it should; -9: the process is killed
       only forked|started     `fail` is for processes that are forks, or for those that were started
       log FILE                every call that succeeds is appended to FILE, with what it wrote: see `record`

   The kinds: open, read, write, sync, truncate, allocate, rename, link, unlink, mkdir. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#undef _FILE_OFFSET_BITS
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, SYNC, TRUNCATE, ALLOCATE, RENAME, LINK, UNLINK, MKDIR, KINDS };
static const char *NAMES[KINDS] = {"open", "read", "write", "sync", "truncate", "allocate", "rename", "link", "unlink",
                                   "mkdir"};
enum { CREATED = 1, TRUNCATED = 2 };

static char below[PATH_MAX];
static size_t below_length;
static char log_path[PATH_MAX];
static int failing = -1, fail_errno;
static long fail_at, fail_many;
static long counts[KINDS];

static int is_fork;

static void configure(void) {
    const char *control = getenv("FAULTS_CONTROL");
    char text[3 * PATH_MAX], kind[16];
    memset(counts, 0, sizeof counts);
    int others = 0;
    failing = -1;
    below_length = 0;
    log_path[0] = 0;
    if (!control) return;
    int fd = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return;
    ssize_t size = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    text[size < 0 ? 0 : size] = 0;
    for (char *save, *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (sscanf(line, "below %4095s", below) == 1) below_length = strlen(below);
        if (sscanf(line, "fail %15s %ld %d %ld", kind, &fail_at, &fail_errno, &fail_many) == 4)
            for (int k = 0; k < KINDS; k++)
                if (!strcmp(kind, NAMES[k])) failing = k;
        if (sscanf(line, "only %15s", kind) == 1) others = is_fork == !strcmp(kind, "started");
        sscanf(line, "log %4095s", log_path);
    }
    if (others) failing = -1;
}

static void configure_fork(void) {
    is_fork = 1;
    configure();
}

__attribute__((constructor)) static void begin(void) {
    configure();
    pthread_atfork(NULL, NULL, configure_fork);
}

static int concerns(const char *path) {
    return below_length && path && !strncmp(path, below, below_length) &&
           (path[below_length] == '/' || !path[below_length]);
}

/* Whether a descriptor is of a file below the folder; its path, which follows the file when it is renamed. */
static int concerns_fd(int fd, char *path) {
    char link[64];
    if (!below_length) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return concerns(path);
}

/* Whether this call is to fail: 0 not, 1 with errno set, -1 with half its bytes. */
static int fails(int kind) {
    long number = __atomic_add_fetch(&counts[kind], 1, __ATOMIC_SEQ_CST);
    if (kind != failing || number < fail_at || number >= fail_at + fail_many) return 0;
    if (fail_errno == -1) return -1;
    if (fail_errno == -9) kill(getpid(), SIGKILL);
    errno = fail_errno;
    return 1;
}

/* Appends a call: kind, lengths of its two paths, offset or flags, length; the paths; the data. */
static void record(int kind, const char *path, const char *other, int64_t offset, int64_t length, const struct iovec *data,
                   int pieces) {
    if (!log_path[0]) return;
    int before = errno;
    /* Opened for each call: a worker of the packer that was forked closes what it inherits. */
    int log_fd = syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    struct { uint32_t kind, path, other, data; int64_t offset, length; } head = {kind, strlen(path), strlen(other), !!pieces,
                                                                                  offset, length};
    size_t total = pieces ? (size_t)length : 0, at = sizeof head;
    char *all = malloc(sizeof head + head.path + head.other + total);
    memcpy(all, &head, sizeof head);
    memcpy(all + at, path, head.path), at += head.path;
    memcpy(all + at, other, head.other), at += head.other;
    for (int i = 0; i < pieces && total; i++) {
        size_t some = data[i].iov_len < total ? data[i].iov_len : total;
        memcpy(all + at, data[i].iov_base, some), at += some, total -= some;
    }
    for (size_t done = 0; done < at;) {
        ssize_t count = syscall(SYS_write, log_fd, all + done, at - done);
        if (count < 0) abort();
        done += count;
    }
    syscall(SYS_close, log_fd);
    free(all);
    errno = before;
}

static int opened(const char *path, int flags, int (*real)(int, const char *, int, mode_t), int folder, mode_t mode) {
    if (!concerns(path)) return real(folder, path, flags, mode);
    if (fails(OPEN) > 0) return -1;
    struct stat info;
    int existed = !fstatat(folder, path, &info, 0);
    int fd = real(folder, path, flags, mode);
    if (fd >= 0)
        record(OPEN, path, "", (!existed && (flags & O_CREAT) ? CREATED : 0) | (flags & O_TRUNC ? TRUNCATED : 0), 0, NULL, 0);
    return fd;
}

static int real_open(int folder, const char *path, int flags, mode_t mode) {
    return syscall(SYS_openat, folder, path, flags, mode);
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }
int open(const char *path, int flags, ...) { MODE return opened(path, flags, real_open, AT_FDCWD, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(path, flags, real_open, AT_FDCWD, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(path, flags, real_open, folder, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(path, flags, real_open, folder, mode); }
int creat(const char *path, mode_t mode) { return opened(path, O_CREAT | O_WRONLY | O_TRUNC, real_open, AT_FDCWD, mode); }
int __open_2(const char *path, int flags) { return opened(path, flags, real_open, AT_FDCWD, 0); }
int __open64_2(const char *path, int flags) { return opened(path, flags, real_open, AT_FDCWD, 0); }

static size_t size_of(const struct iovec *data, int pieces) {
    size_t total = 0;
    for (int i = 0; i < pieces; i++) total += data[i].iov_len;
    return total;
}

/* One vector that has the first half of the bytes. */
static struct iovec half(const struct iovec *data, int pieces) {
    for (int i = 0; i < pieces; i++)
        if (data[i].iov_len) return (struct iovec){data[i].iov_base, (data[i].iov_len + 1) / 2};
    return (struct iovec){NULL, 0};
}

static ssize_t moved(int kind, int fd, const struct iovec *data, int pieces, int64_t offset, int flags) {
    char path[PATH_MAX];
    int number = kind == READ ? (offset < 0 ? SYS_readv : SYS_preadv2) : (offset < 0 ? SYS_writev : SYS_pwritev2);
    struct iovec some;
    int ours = concerns_fd(fd, path), fault = ours ? fails(kind) : 0;
    if (fault > 0) return -1;
    if (fault < 0 && size_of(data, pieces) > 1) some = half(data, pieces), data = &some, pieces = 1;
    int64_t at = offset < 0 && ours && kind == WRITE ? syscall(SYS_lseek, fd, 0, SEEK_CUR) : offset;
    ssize_t count = offset < 0 ? syscall(number, fd, data, pieces) : syscall(number, fd, data, pieces, offset, 0, flags);
    if (ours && count >= 0) record(kind, path, "", at, count, kind == WRITE ? data : NULL, kind == WRITE ? pieces : 0);
    return count;
}

#define ONE struct iovec one = {(void *)data, size}
ssize_t read(int fd, void *data, size_t size) { ONE; return moved(READ, fd, &one, 1, -1, 0); }
ssize_t __read_chk(int fd, void *data, size_t size, size_t most) { (void)most; ONE; return moved(READ, fd, &one, 1, -1, 0); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { ONE; return moved(READ, fd, &one, 1, at, 0); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { ONE; return moved(READ, fd, &one, 1, at, 0); }
ssize_t __pread_chk(int fd, void *data, size_t size, off_t at, size_t most) { (void)most; ONE; return moved(READ, fd, &one, 1, at, 0); }
ssize_t __pread64_chk(int fd, void *data, size_t size, off64_t at, size_t most) { (void)most; ONE; return moved(READ, fd, &one, 1, at, 0); }
ssize_t readv(int fd, const struct iovec *data, int pieces) { return moved(READ, fd, data, pieces, -1, 0); }
ssize_t preadv(int fd, const struct iovec *data, int pieces, off_t at) { return moved(READ, fd, data, pieces, at, 0); }
ssize_t preadv64(int fd, const struct iovec *data, int pieces, off64_t at) { return moved(READ, fd, data, pieces, at, 0); }
ssize_t write(int fd, const void *data, size_t size) { ONE; return moved(WRITE, fd, &one, 1, -1, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { ONE; return moved(WRITE, fd, &one, 1, at, 0); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { ONE; return moved(WRITE, fd, &one, 1, at, 0); }
ssize_t writev(int fd, const struct iovec *data, int pieces) { return moved(WRITE, fd, data, pieces, -1, 0); }
ssize_t pwritev(int fd, const struct iovec *data, int pieces, off_t at) { return moved(WRITE, fd, data, pieces, at, 0); }
ssize_t pwritev64(int fd, const struct iovec *data, int pieces, off64_t at) { return moved(WRITE, fd, data, pieces, at, 0); }

/* Python calls these for os.preadv and os.pwritev. */
ssize_t preadv2(int fd, const struct iovec *data, int pieces, off_t at, int flags) { return moved(READ, fd, data, pieces, at, flags); }
ssize_t preadv64v2(int fd, const struct iovec *data, int pieces, off64_t at, int flags) { return moved(READ, fd, data, pieces, at, flags); }
ssize_t pwritev2(int fd, const struct iovec *data, int pieces, off_t at, int flags) { return moved(WRITE, fd, data, pieces, at, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *data, int pieces, off64_t at, int flags) { return moved(WRITE, fd, data, pieces, at, flags); }

static int synced(int fd, int number) {
    char path[PATH_MAX];
    int ours = concerns_fd(fd, path);
    if (ours && fails(SYNC) > 0) return -1;
    int result = syscall(number, fd);
    if (ours && !result) record(SYNC, path, "", number == SYS_syncfs, 0, NULL, 0);
    return result;
}

int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }
int syncfs(int fd) { return synced(fd, SYS_syncfs); }

static int truncated(int fd, int64_t length) {
    char path[PATH_MAX];
    int ours = concerns_fd(fd, path);
    if (ours && fails(TRUNCATE) > 0) return -1;
    int result = syscall(SYS_ftruncate, fd, length);
    if (ours && !result) record(TRUNCATE, path, "", 0, length, NULL, 0);
    return result;
}

int ftruncate(int fd, off_t length) { return truncated(fd, length); }
int ftruncate64(int fd, off64_t length) { return truncated(fd, length); }

static int allocated(int fd, int64_t offset, int64_t length) {
    char path[PATH_MAX];
    int ours = concerns_fd(fd, path);
    if (ours && fails(ALLOCATE) > 0) return errno;
    static int (*real)(int, off64_t, off64_t);
    if (!real) real = (int (*)(int, off64_t, off64_t))dlsym(RTLD_NEXT, "posix_fallocate64");
    int result = real(fd, offset, length);
    if (ours && !result) record(ALLOCATE, path, "", offset, length, NULL, 0);
    return result;
}

int posix_fallocate(int fd, off_t offset, off_t length) { return allocated(fd, offset, length); }
int posix_fallocate64(int fd, off64_t offset, off64_t length) { return allocated(fd, offset, length); }

int rename(const char *from, const char *to) {
    int ours = concerns(from) || concerns(to);
    if (ours && fails(RENAME) > 0) return -1;
    int result = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (ours && !result) record(RENAME, from, to, 0, 0, NULL, 0);
    return result;
}

int link(const char *from, const char *to) {
    int ours = concerns(from) || concerns(to);
    if (ours && fails(LINK) > 0) return -1;
    int result = syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (ours && !result) record(LINK, from, to, 0, 0, NULL, 0);
    return result;
}

int unlink(const char *path) {
    int ours = concerns(path);
    if (ours && fails(UNLINK) > 0) return -1;
    int result = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
    if (ours && !result) record(UNLINK, path, "", 0, 0, NULL, 0);
    return result;
}

int mkdir(const char *path, mode_t mode) {
    int ours = concerns(path);
    if (ours && fails(MKDIR) > 0) return -1;
    int result = syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (ours && !result) record(MKDIR, path, "", 0, 0, NULL, 0);
    return result;
}
