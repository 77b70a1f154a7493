"""What this node sees of itself and of its peers, as one JSON document (`aura probe` prints it).

`playbooks/connectivity.yml` runs it on every node at the same moment; `aura.check.connectivity` judges the documents.

Phase 1 needs no order: every node listens on two ports of its LAN address, greets whoever connects with its own
name, and connects to both ports of every peer, again and again until an answer or until its patience ends (the
nodes do not start at the same moment). Phase 2 is conducted by the first node, the coordinator, over one control
connection per node: in each round disjoint pairs measure the bandwidth, one direction after the other.

Every wait is bounded: a node that is missing, or that dies in the middle, costs time but hangs nobody.
Standard library only: it answers in a second, and where torch is broken.
"""
