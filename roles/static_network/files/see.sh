#!/bin/sh
# What tasks/preflight.yml wants to know, a line each: a key, a blank, the value.
# usage: see.sh NEW_ADDRESS PACKAGE...   (as the user who logged in: sudo would hide SSH_CONNECTION)
address=$1
shift
packages=$*

# Four words: the client's address and port, ours and our port.
# shellcheck disable=SC2086
set -- $SSH_CONNECTION
echo "client $1"
echo "here $3"

card=$(ip -o -4 address show to "$3/32" | awk '{print $2; exit}')
echo "card $card"
for kind in wireless bridge bonding; do
  if [ -n "$card" ] && [ -e "/sys/class/net/$card/$kind" ]; then echo "kind $kind"; fi
done
if grep -qsE "^[[:space:]]*iface[[:space:]]+${card}[[:space:]]" /etc/network/interfaces /etc/network/interfaces.d/*; then
  echo "ifupdown yes"
fi

if [ -n "$(ip -o -4 address show to "$address/32")" ]; then
  echo "has yes"
else
  echo "has no"
  # Whoever does not answer a ping still answers ARP.
  if ping -c 1 -w 2 "$address" >/dev/null 2>&1 || ip neighbour show to "$address" nud reachable | grep -q lladdr; then
    echo "taken $(ip neighbour show to "$address" | sed -n 's/.* lladdr \([^ ]*\).*/hardware address \1/p')"
  fi
fi

if [ -d /etc/netplan ]; then echo "netplan yes"; fi
if [ -d /etc/cloud/cloud.cfg.d ]; then echo "cloud yes"; fi
for package in $packages; do
  # The variable is dpkg-query's own.
  # shellcheck disable=SC2016
  if [ "$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
    echo "missing $package"
  fi
done
if ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1; then echo "apt lists"; fi
