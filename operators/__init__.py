"""Makes a Drafter true: observe, plan (pure), execute on this machine or on a cluster. No torch."""
