"""The command line behind `legato.__main__`: one module per subcommand, and what they share.

Owns terminal input and output. Knows the library as any user does; `legato.__main__` imports a module here per subcommand.
"""
