"""What stock verl lacks on a machine without an accelerator; importing this package changes nothing.

`plugin` alone has effects. verl imports it in each of its processes because the environment
variable VERL_USE_EXTERNAL_MODULES names it, and `settings.apply` sets that variable only for runs
with `hardware=cpu`.
"""
