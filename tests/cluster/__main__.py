"""The throwaway cluster for a person: `python -m tests.cluster up`, `down`, `env`, `build`."""

import argparse
import logging
import sys

from tests.cluster import binaries, cluster, images


def main() -> int:
    """Do as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("up", "down", "env", "build"))
    command = parser.parse_args().command
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if command == "up":
            made = cluster.Cluster()
            made.start()
            made.import_image(images.host_python(cluster.ROOT / "images"))
            print(made.kubectl("get", "nodes"))
            print("To use it:  eval $(python -m tests.cluster env)\nTo stop it: make cluster-down")
        elif command == "down":
            binaries.require_machine()
            cluster.clear()
        elif command == "build":
            binaries.install_system_packages()
            binaries.built()
        else:
            folder = binaries.built()
            print(f"export KUBECONFIG={cluster.ROOT}/pki/admin.conf PATH={folder}:$PATH")
    except binaries.CannotRun as error:
        print(error, file=sys.stderr)
        return 78
    return 0


if __name__ == "__main__":
    sys.exit(main())
