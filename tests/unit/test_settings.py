import pytest

from flash_rt.flashrt_hf import settings


def test_names_are_unique_and_documented():
    names = [setting.name for setting in settings.SETTINGS]
    assert len(set(names)) == len(names) < 10
    assert all(setting.help for setting in settings.SETTINGS)


def test_unset_or_empty_means_default(monkeypatch):
    monkeypatch.delenv("FLASH_RT_REQUIRE_GPU", raising=False)
    assert settings.REQUIRE_GPU.get() is False
    monkeypatch.setenv("FLASH_RT_REQUIRE_GPU", "")
    assert settings.REQUIRE_GPU.get() is False


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        (settings.REQUIRE_GPU, "1", True),
        (settings.REQUIRE_GPU, "0", False),
        (settings.MAX_JOBS, "3", 3),
    ],
)
def test_values(monkeypatch, setting, text, value):
    monkeypatch.setenv(setting.name, text)
    assert setting.get() == value


@pytest.mark.parametrize(
    ("setting", "text", "message"),
    [
        (settings.REQUIRE_GPU, "yes", "FLASH_RT_REQUIRE_GPU: must be 0 or 1, got 'yes'"),
        (settings.MAX_JOBS, "0", "MAX_JOBS: must be a positive integer, got '0'"),
        (settings.MAX_JOBS, "two", "MAX_JOBS: must be a positive integer, got 'two'"),
        (
            settings.CUDA_HOME,
            "/nowhere",
            "CUDA_HOME: must be an existing directory, got '/nowhere'",
        ),
    ],
)
def test_bad_values_raise(monkeypatch, setting, text, message):
    monkeypatch.setenv(setting.name, text)
    with pytest.raises(ValueError) as caught:
        setting.get()
    assert str(caught.value) == message
