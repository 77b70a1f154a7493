#!/bin/sh
# What the tasks want to know, a line each: a key, a blank, the value.
# usage: see.sh LAN_ADDRESS FILE...   (files that the role writes: their sha256 sum, mode and owner)
# To be run as the user who logged in: sudo would hide SSH_CONNECTION.
address=$1
shift
for file in "$@"; do
  if [ -f "$file" ]; then echo "$file $(sha256sum <"$file" | cut -c 1-64) $(stat --format '%a %U:%G' "$file")"; fi
done

# Four words: the client's address and port, ours and our port.
# shellcheck disable=SC2086
set -- $SSH_CONNECTION
echo "client $1"
echo "here $3"
echo "port $4"
echo "card $(ip -o -4 address show to "$address/32" | awk '{print $2; exit}')"
echo "card_here $(ip -o -4 address show to "$3/32" | awk '{print $2; exit}')"

if grep -qs '^ENABLED=yes' /etc/ufw/ufw.conf; then echo "ufw active"; fi
if systemctl -q is-active firewalld; then echo "firewalld active"; fi
if [ -x /usr/sbin/nft ]; then echo "nft installed"; fi
echo "unit $(systemctl is-active aura-firewall) $(systemctl is-enabled aura-firewall 2>/dev/null)"
if ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1; then echo "apt lists"; fi
