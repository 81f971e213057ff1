"""Server processes: started, found, restarted when they die.

Reading order:
    server.py           one process; command.py  its command line; held_port.py  its port
    fleet.py            several of them, restarted when they die; own_fleet.py  those that a run starts; gpus.py  where
    own_gateway.py      the gateway in front of them, started or given by address
    registry.py         the folder in which servers announce themselves
    server_process.py   which process answers, of which model

May import: what sglang/ may, never sync/.
"""
