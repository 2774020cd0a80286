"""The timeouts and pauses of sessions, links, relays and snapshot parts, in seconds, in one place.

They are read where they are used, as `timeouts.NAME`, so that tests can scale all of them at once. What the owner of a
run may set is in the spec (`limits`). This module imports nothing.
"""

from __future__ import annotations

# A session: one peer and the coordinator.
SESSION_RECONNECT = 2.0  # for a holder to come back after its connection closed, before a spare takes its stage
SESSION_RETRY = 0.5, 5.0  # between two tries of a peer to reach its coordinator again: at first, and at most
SESSION_CLOSE = 2.0  # for a dismissed peer to read the reason
COORDINATOR_TICK = 0.5  # between two looks of the coordinator at leases and deadlines
DIAL_BACK = 4.0  # for the coordinator to reach a peer's own port
# For peers to come back after the last step and hear that the run is done. The journal does not know spares, which try
# every other second; a holder may have lost the coordinator just before it was told.
END_SPARES, END_HOLDERS = 10.0, 60.0

# A link: two neighbours.
# Between two questions whether the neighbour is there. An idle link must speak more often than routers forget it.
LINK_ASK_EVERY = 2.0
LINK_SILENT = 6.0  # without a message, although questions are asked: the connection is given up
LINK_LOOK_EVERY = 0.5  # between two looks at how long the link has been silent
LINK_MEND = 10.0  # for a broken link to open again before the coordinator hears of it, and then as often
PATH_DIRECT_ALONE = 3.0  # direct addresses are tried this long before relays are tried as well
PATH_FIND = 15.0  # for one path to lead to the neighbour; then all are tried again
PATH_OPEN = 10.0  # for a stream to open once the neighbour answers
PATH_LOOK_FIRST, PATH_LOOK_EVERY = 10.0, 30.0  # when a relayed link looks for a direct path, and how often
PATH_LOOK = 5.0  # for such a look
PATH_MOVE = 10.0  # for the neighbour to have taken everything before a link moves to another path
ADDRESS_EVERY = 1.0  # between two looks at this machine's own address
PUNCH_ANSWER = 6.0  # for the neighbour to learn its public port and to answer
PUNCH_OPEN = 6.0  # for a punched connection to open; its first packet is sent four times
PUNCH_OFFERS_EVERY = 5.0  # between two offers of a neighbour that are answered

# A relay.
RELAY_WAIT = 30.0  # how long one side waits there for the other
RELAY_ANSWER = 45.0  # a relay that has not answered by then is gone; more than RELAY_WAIT
RELAY_TRIP = 1.0  # for a relay to answer when the round trip to it is measured
RELAY_FIRST_PAUSE, RELAY_LONGEST_PAUSE = 0.2, 10.0  # between two tries to reach a relay

# A part of a snapshot.
PART_PROOF = 30.0  # for a peer to prove that it has a part; that takes a few reads
PART_RETRY = 3.0  # between two tries to send or fetch a part that nobody waits for
PART_RETRY_URGENT = 0.2  # between two tries while the run waits for the part

# A message to the owner (`coordinator --notify`).
NOTIFY_WAIT = 600.0  # that a run has waited for peers
NOTIFY_AGAIN = 2.0, 10.0  # between two tries
NOTIFY_LAST = 15.0  # for the last messages to leave before the coordinator ends
