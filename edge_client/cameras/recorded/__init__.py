"""Pictures from files: films, folders, recorded driving, drawn streets. Every picture is delivered."""
