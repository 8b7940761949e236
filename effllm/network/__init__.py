"""Discovery, authentication and transport between the processes of a job."""
