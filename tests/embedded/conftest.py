import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """One for each test: what a page promises must not depend on what another has read."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
