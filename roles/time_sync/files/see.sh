#!/bin/sh
# What the tasks want to know, a line each: a key, a blank, the value.
# usage: see.sh FILE...   (files that the role writes: their sha256 sum, mode and owner)
# The variable is dpkg-query's own.
# shellcheck disable=SC2016
echo "package $(dpkg-query --show --showformat '${db:Status-Status}' chrony 2>/dev/null)"
echo "unit $(systemctl is-active chrony) $(systemctl is-enabled chrony 2>/dev/null)"
for file in "$@"; do
  if [ -f "$file" ]; then echo "$file $(sha256sum <"$file" | cut -c 1-64) $(stat --format '%a %U:%G' "$file")"; fi
done
if ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1; then echo "apt lists"; fi
