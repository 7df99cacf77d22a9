"""Fixtures of the tests of synthetic runs."""

import json

import pytest

from synthetic import config


@pytest.fixture
def make_cfg(tmp_path, request):
    """Function of overrides that returns a config of the module's TREE."""

    def build(*overrides):
        path = tmp_path / "c.yaml"
        path.write_text(json.dumps(request.module.TREE))
        return config.load(path, (f"out_dir={tmp_path / 'runs'}", *overrides))

    return build
