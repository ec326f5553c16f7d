# A real Kubernetes on this machine (root on Linux, with Go): to try things on.

cluster: .venv/.synced  ## Start a throwaway Kubernetes on this machine (the first time builds it: ten minutes)
	@$(RUN) -m tests.cluster up

cluster-down: .venv/.synced  ## Stop it, leaving nothing
	@$(RUN) -m tests.cluster down
