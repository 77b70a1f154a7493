#!/bin/sh
# What tasks/main.yml wants to know, a line each.
# usage: see.sh UID PACKAGE... -- DIRECTORY...
id=$1
shift
getent passwd aura "$id" | sort -u | awk -F: '{print "user", $1, $3, $4, $6, $7}'
getent group aura "$id" | sort -u | awk -F: '{print "group", $1, $3}'
while [ "$1" != -- ]; do
  # The variable is dpkg-query's own.
  # shellcheck disable=SC2016
  if [ "$(dpkg-query --show --showformat '${db:Status-Status}' "$1" 2>/dev/null)" != installed ]; then
    echo "missing $1"
  fi
  shift
done
shift
stat --format 'directory %n %U %G 0%a' "$@" 2>/dev/null
if ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1; then echo "apt lists"; fi
exit 0
