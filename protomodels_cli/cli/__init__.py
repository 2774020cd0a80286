"""The command line: one small file per command, which parses, calls and prints.

Nothing here imports torch or grpc at the top: `pmtrain --help` must answer at once.
"""
