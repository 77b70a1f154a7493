"""The modules beside the tests (tree.py, role_tables.py) can be imported from anywhere; our module_utils where Ansible
puts them on a node."""

import sys
from pathlib import Path

import ansible.module_utils

ansible.module_utils.__path__.append(str(Path(__file__).parents[2] / "plugins/module_utils"))
sys.path.insert(0, str(Path(__file__).parent))
