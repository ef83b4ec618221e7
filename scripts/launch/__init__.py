"""A fleet of real processes on this machine: started from a plan, watched through its journal, ended by its ids."""
