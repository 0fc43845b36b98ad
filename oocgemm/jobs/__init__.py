"""From a call to a finished C: check the call, open the arrays, plan, run, make C durable; verify a C."""
