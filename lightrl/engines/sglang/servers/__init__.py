"""Server processes: started, found, restarted when they die.

Reading order:
    server.py           one process; command.py  its command line
    fleet.py            several of them, restarted when they die; own_fleet.py  those that a run starts
    own_gateway.py      the gateway in front of them, started or given by address
    registry.py         the folder in which servers announce themselves
    server_process.py   which process answers, of which model

May import: what sglang/ may, never sync/.
"""
