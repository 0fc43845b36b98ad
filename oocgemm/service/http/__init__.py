"""The HTTP server of the service.

- `server`: the application, its sockets, and its life.
- `service`: what all requests share: the configuration, the database, the dispatcher, the feed of changes,
  and the turns of requests that plan.
- `security`: who sends a request, and what it passes before its route.
- `routes`: the routes. `views`: the JSON of requests and answers.

The event loop neither reads the database nor plans. Threads do both, and ask a confined process for plans.
"""
