import pytest

from fastload.sources.boxes import flip_pairs_of

COCO = (
    "nose left_eye right_eye left_ear right_ear left_shoulder right_shoulder left_elbow right_elbow left_wrist "
    "right_wrist left_hip right_hip left_knee right_knee left_ankle right_ankle"
).split()


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (COCO, (0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15)),
        (["LeftEye", "RightEye", "Nose"], (1, 0, 2)),
        (["eye_r", "eye_l", "tail"], (1, 0, 2)),
        (["L_F_paw", "R_F_paw", "left paw"], (1, 0, 2)),
        (["ear-left", "nose"], ()),  # without the other one
        (["collar", "wheel", "roof"], ()),  # l and r inside of words
        (["left", "Left", "right"], (0, 2, 1)),
        ([], ()),
    ],
)
def test_names_say_which_points_change_places_in_a_mirror(names: list[str], pairs: tuple[int, ...]) -> None:
    assert flip_pairs_of(names) == pairs
    assert [pairs[other] for other in pairs] == list(range(len(pairs)))
