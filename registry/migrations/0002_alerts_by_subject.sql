-- How many alerts of a kind came about a subject lately: asked for every batch that holds dead letters.
CREATE INDEX alerts_by_subject ON alerts (type, subject, time_ms DESC);
