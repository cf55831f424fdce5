"""Without transformers, or with one that is too old."""

import sys

import pytest

import symm_a2a
from symm_a2a.integrations.transformers import register


@pytest.mark.parametrize("missing", ["transformers", "transformers.distributed.expert_parallel"])
def test_the_error_names_the_extra(missing, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError) as caught:
        register(max_tokens_per_rank=8)
    assert "expected transformers" in str(caught.value)
    assert "pip install 'symm-a2a[integrations]'" in str(caught.value)
