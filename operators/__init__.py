"""Makes a Drafter true: observe, plan, execute, again until there is nothing left to do.

`plan.plan` is one pure function; `local` carries its decisions out with processes on this machine,
`cluster` with Jobs. No torch here.
"""
