"""Arguments of images and video: limits, and what turns them off."""

import pytest

from quire.config.args import EngineArgs
from quire.features.media.host import read_limits
from quire.types.errors import ConfigError


def test_limits_by_kind():
    assert read_limits({}) == {"image": 999, "video": 999}
    assert read_limits({"image": 4, "video": {"count": 0, "num_frames": 8}, "audio": 0}) == {"image": 4, "video": 0}
    for wrong, message in (
        ({"image": -1}, "limit_mm_per_prompt.image must be an integer of at least 0; got -1"),
        ({"image": True}, "limit_mm_per_prompt.image must be an integer of at least 0; got True"),
        ({"image": {"number": 1}}, "limit_mm_per_prompt.image has no number; it has count"),
        ({"audio": 1}, "limit_mm_per_prompt must be for image or video; got 'audio'"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineArgs(limit_mm_per_prompt=wrong)


def test_wrong_values_are_named(tmp_path):
    with pytest.raises(ConfigError, match="allowed_local_media_path must be a directory"):
        EngineArgs(allowed_local_media_path=str(tmp_path / "none"))
    for wrong, message in (
        ({"video": 3}, "media_io_kwargs.video must be an object; got int"),
        ({"audio": {}}, "media_io_kwargs has no 'audio'; it has image and video"),
        ({"video": {"frames": 3}}, "media_io_kwargs.video has no 'frames'; it has num_frames and fps"),
        ({"video": {"num_frames": 0}}, "media_io_kwargs.video.num_frames must be between 1 and 768"),
        ({"video": {"fps": float("nan")}}, "media_io_kwargs.video.fps must be above 0"),
        ({"image": {"image_mode": "L"}}, 'media_io_kwargs.image.image_mode must be "RGB"'),
        ({"image": {"rgba_background_color": [0, 0]}}, "rgba_background_color must have three integers from 0 to 255"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineArgs(media_io_kwargs=wrong)
    EngineArgs(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}, "video": {"num_frames": -1, "fps": 2}})
