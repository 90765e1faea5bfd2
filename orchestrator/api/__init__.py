"""The HTTP API (`toolcrew serve api`) for programs, approvers and operators, and the pages for people."""
