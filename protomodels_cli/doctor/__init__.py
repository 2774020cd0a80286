"""What a machine needs to take part in a run: facts about it and its line, and what is wrong with them.

`facts.py` is data; `local_checks.py` and `line_checks.py` make findings of it, without I/O; `machine.py` and
`contact.py` look.
"""
