"""Python imports this at its start, since run.sh puts it on the path: once torch is imported, its CUDA kernels run on the host.

Nothing here stands in for anything; it only calls ``host_kernels.install``, unless ``STANDIN_KERNELS=none``.
"""

import faulthandler
import importlib.abc
import importlib.machinery
import os
import signal
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as others do, and acts when it has been imported."""

    def find_spec(self, name, path=None, target=None):
        """See the base class. Some only ask whether there is a torch."""
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def then_install(module):
            sys.meta_path.remove(self)
            run(module)
            import host_kernels

            host_kernels.install()

        spec.loader.exec_module = then_install
        return spec


faulthandler.register(signal.SIGUSR2, all_threads=False)  # the stand-in sends it where it has something to report
if os.environ.get("STANDIN_KERNELS", "host") != "none":
    sys.meta_path.insert(0, AfterTorch())
