"""Fixtures of several modules here."""

import os

import pytest

from tests.train.tracking import WANDB


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts a made-up wandb on the path, here and for processes; what it got is read with `got`."""

    def make(start="pass", log="pass", finish="pass"):
        package = tmp_path / "fakes" / "wandb"
        package.mkdir(parents=True, exist_ok=True)
        text = WANDB.format(folder=str(tmp_path), start=start, log=log, finish=finish)
        (package / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(package.parent)
        path = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    return make
