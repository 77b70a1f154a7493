"""The modules beside the tests (tree.py, role_tables.py) can be imported from anywhere."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
