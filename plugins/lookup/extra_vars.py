"""The variables given with -e, so that a misspelt one can be refused."""

from __future__ import annotations

from ansible import context
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.splitter import parse_kv
from ansible.plugins.lookup import LookupBase
from ansible.utils.vars import load_extra_vars


class LookupModule(LookupBase):
    """One dictionary with all variables that this ansible-playbook was given with -e, and their values.

    whole: names whose value is all that follows in the same -e, where that is not in quotes. Ansible would cut it at
    the first blank, and take what comes after it for other variables.
    """

    def run(self, terms, variables=None, whole=(), **kwargs):
        given = load_extra_vars(self._loader or DataLoader())
        own = {"ansible_version", "ansible_check_mode", "ansible_diff_mode"}
        assert context.CLIARGS is not None
        for text in context.CLIARGS["extra_vars"]:
            name, _, value = text.partition("=")
            if name in whole and value[:1] not in ("'", '"'):
                for piece in parse_kv(text):
                    given.pop(piece, None)
                given[name] = value
        return [{name: value for name, value in given.items() if name not in own}]
