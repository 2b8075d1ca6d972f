"""The demo pair: a small target model, its DFlash drafter, and the scripts that made both (see MODEL_CARD.md)."""

from pathlib import Path

TARGET_DIR = Path(__file__).parent / "target"
DRAFT_DIR = Path(__file__).parent / "draft"
