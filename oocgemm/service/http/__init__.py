"""The HTTP server of the service.

- `server`: sockets, the dispatcher's thread, signals.
- `service`: what all requests share: the configuration, the database, the dispatcher, the feed of changes.
- `security`: who sends a request, and what it passes before its route.
- `app`: the application. `routes`, `event_stream`: its routes. `views`: the JSON of requests and answers.
- `turns`: the requests that plan jobs, and their turns.

The event loop neither reads the database nor plans. Threads do both, and ask a confined process for plans.
"""
