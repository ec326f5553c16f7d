# A real Kubernetes on this machine (root on Linux, with Go): to try things on, and for tests.

cluster: .venv/.synced  ## Start a throwaway Kubernetes on this machine (the first time builds it: ten minutes)
	@$(RUN) -m tests.cluster up

cluster-down: .venv/.synced  ## Stop it, leaving nothing
	@$(RUN) -m tests.cluster down

# Exit code 78: this machine cannot run one, which has been said; the tests then skip.
cluster-test: .venv/.synced  ## Run the tests that need a real Kubernetes
	@$(RUN) -m tests.cluster build || [ $$? -eq 78 ]
	@$(RUN) -m pytest -m 'cluster and not soak' tests/cluster
