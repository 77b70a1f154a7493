"""What `make null-card` and `make test-more` try without a card: every preset."""

import runpy

import tree


def test_every_preset_has_a_card() -> None:
    presets = {path.stem for path in (tree.ROOT / "training/aura/presets").glob("*.toml")}
    tried = runpy.run_path(str(tree.ROOT / "tests/null_card/presets.py"))["CARDS"]
    assert set(tried) == presets - {"manual"}
