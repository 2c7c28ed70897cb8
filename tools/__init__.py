"""What proves PyDanube and is not part of it: the simulator of logs and clusters, and chaos over real processes."""
