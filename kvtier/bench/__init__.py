"""Measurements that ``kvtier bench`` makes: each a module with ``add_arguments(parser)`` and ``run(args) -> int``."""
