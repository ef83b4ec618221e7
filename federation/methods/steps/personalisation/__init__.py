"""Eq. 3 of pFedGRP: how much of each model a client gets, from replay; one client by itself, or many as one."""
