"""Tests read all that Ansible says, not what a person wants to see of it (plugins/callback/aura.py)."""

import os

os.environ.setdefault("ANSIBLE_STDOUT_CALLBACK", "default")
