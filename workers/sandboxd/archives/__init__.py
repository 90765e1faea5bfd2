"""Where archives of sessions are kept when their sandbox is not: a folder of this host, or a store that several hosts
share.
"""
