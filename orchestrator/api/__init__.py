"""The HTTP API (`toolcrew serve api`): what programs, approvers and operators reach over the network, and the pages
that people look at.
"""
