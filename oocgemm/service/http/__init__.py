"""The HTTP server of the service.

- `config`: what `oocgemm serve` was told.
- `service`: what all requests share: the database, the dispatcher, the feed of events.
- `app`: the application, and the routes of jobs. `files`, `events`, `machine`, `page` have the other ones.
- `views`: the JSON of requests and answers. `problems`: the JSON of errors.
- `security`: what a request passes before its route. `identity`, `tokens`: who sends it.
- `plans`: the requests that plan jobs, and their turns.
- `submission`: from a request to a job of the store.
- `server`: sockets, the dispatcher's thread, signals.

The event loop neither reads the database nor plans. Threads do both, and ask a confined process for plans.
"""
