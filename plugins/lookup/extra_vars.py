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
        loader = self._loader or DataLoader()
        given = load_extra_vars(loader)
        own = {"ansible_version", "ansible_check_mode", "ansible_diff_mode"}
        assert context.CLIARGS is not None
        pieces, others = set(), {}
        for text in context.CLIARGS["extra_vars"]:
            name, _, value = text.partition("=")
            if name in whole and value[:1] not in ("'", '"'):
                pieces |= parse_kv(text).keys()
                others[name] = value
            elif text[:1] == "@":
                others |= loader.load_from_file(text[1:]) or {}
            else:
                others |= loader.load(text) if text[:1] in "[{" else parse_kv(text)
        for piece in pieces:
            given.pop(piece, None)
        given |= {name: others[name] for name in (*pieces, *whole) if name in others}
        return [{name: value for name, value in given.items() if name not in own}]
