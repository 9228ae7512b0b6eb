-- What the registry remembers. Times of our own are timestamptz; times that came in messages stay milliseconds, as they were said.

-- One row a job: the highest (attempt, lease epoch) ever opened. Its row lock puts opens and commits in one order.
CREATE TABLE fences (
    job_uid text PRIMARY KEY,
    namespace text NOT NULL,
    model_name text NOT NULL,
    spec_digest text NOT NULL,
    attempt_number integer NOT NULL,
    lease_epoch bigint NOT NULL,
    resume_checkpoint_id text,               -- pinned at the first open of the epoch, the same for every node of the gang
    opened_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE attempt_tokens (
    token_hash bytea PRIMARY KEY,            -- SHA-256; the token itself is nowhere
    job_uid text NOT NULL REFERENCES fences,
    attempt_number integer NOT NULL,
    lease_epoch bigint NOT NULL,
    node text NOT NULL,
    world_size integer NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (job_uid, attempt_number, lease_epoch, node)
);

-- Begun and not committed. Inserted before anything is made in the object store, so that whatever lies there without a checkpoint can be found.
CREATE TABLE uploads (
    job_uid text NOT NULL REFERENCES fences,
    checkpoint_id text NOT NULL,
    attempt_number integer NOT NULL,
    lease_epoch bigint NOT NULL,
    global_step bigint NOT NULL,
    object_prefix text NOT NULL,
    files jsonb NOT NULL,                    -- [{name, size, sha256, upload_id}]; upload_id null until the store has answered
    state text NOT NULL DEFAULT 'begun' CHECK (state IN ('begun', 'collecting')),
    begun_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (job_uid, checkpoint_id)
);
CREATE INDEX uploads_begun_at ON uploads (begun_at);

CREATE TABLE checkpoints (
    job_uid text NOT NULL REFERENCES fences,
    checkpoint_id text NOT NULL,
    namespace text NOT NULL,
    attempt_number integer NOT NULL,
    lease_epoch bigint NOT NULL,
    global_step bigint NOT NULL,
    digest text NOT NULL,
    size_bytes bigint NOT NULL,
    object_prefix text NOT NULL,
    files jsonb NOT NULL,
    metrics jsonb NOT NULL,
    lineage jsonb NOT NULL,
    final boolean NOT NULL,
    outcome text,
    stop_reason text,
    committed_at timestamptz NOT NULL DEFAULT now(),
    expired_at timestamptz,                  -- set before its objects are deleted; an expired checkpoint is shown to nobody
    emptied boolean NOT NULL DEFAULT false,  -- its objects are gone
    PRIMARY KEY (job_uid, checkpoint_id)
);
CREATE INDEX checkpoints_newest ON checkpoints (job_uid, global_step DESC, committed_at DESC) WHERE expired_at IS NULL;

CREATE TABLE models (
    namespace text NOT NULL,
    name text NOT NULL,
    last_version integer NOT NULL DEFAULT 0, -- its row lock gives versions 1..n without a gap
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (namespace, name)
);

CREATE TABLE model_versions (
    namespace text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    job_uid text NOT NULL UNIQUE,            -- one version a job, however often its end is reported
    checkpoint_id text NOT NULL,
    attempt_number integer NOT NULL,
    spec_digest text NOT NULL,
    stop_reason text,
    metrics jsonb NOT NULL,
    lineage jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (namespace, name, version),
    FOREIGN KEY (namespace, name) REFERENCES models,
    FOREIGN KEY (job_uid, checkpoint_id) REFERENCES checkpoints
);

-- Events of the registry, written in the transaction they tell of. Rows of one job are in order: its fence is locked while they are written.
CREATE TABLE outbox (
    id bigserial PRIMARY KEY,
    topic text NOT NULL,
    key text NOT NULL,
    value bytea NOT NULL,
    headers jsonb NOT NULL,                  -- [[name, text]]
    created_at timestamptz NOT NULL DEFAULT now(),
    published_at timestamptz
);
CREATE INDEX outbox_unpublished ON outbox (id) WHERE published_at IS NULL;

-- Projections of topics. The offsets move in the transaction that holds the effects.
CREATE TABLE projection_offsets (
    topic text NOT NULL,
    partition integer NOT NULL,
    next_offset bigint NOT NULL,
    PRIMARY KEY (topic, partition)
);

CREATE TABLE jobs (
    job_uid text PRIMARY KEY,
    namespace text NOT NULL,
    name text NOT NULL,
    pool text NOT NULL,
    revision bigint NOT NULL,
    phase text NOT NULL,
    reason text NOT NULL DEFAULT '',
    message text NOT NULL DEFAULT '',
    attempt_number integer NOT NULL DEFAULT 0,
    submitted_by text,
    labels jsonb,
    spec jsonb,
    spec_digest text,
    stop_reason text,
    model_name text,
    model_version integer,
    submitted_ms bigint,
    finished_ms bigint,
    updated_ms bigint NOT NULL
);
CREATE INDEX jobs_by_name ON jobs (namespace, name, submitted_ms DESC);

CREATE TABLE job_events (
    job_uid text NOT NULL,
    revision bigint NOT NULL,
    type text NOT NULL,
    time_ms bigint NOT NULL,
    data jsonb NOT NULL,
    PRIMARY KEY (job_uid, revision)
);

CREATE TABLE training_metrics (
    job_uid text NOT NULL,
    attempt_number integer NOT NULL,
    replica_rank integer NOT NULL,
    global_step bigint NOT NULL,
    update_number bigint NOT NULL,
    node text NOT NULL,
    time_ms bigint NOT NULL,
    metric_values jsonb NOT NULL,
    PRIMARY KEY (job_uid, attempt_number, replica_rank, global_step)
);

CREATE TABLE attempt_logs (
    seq bigserial UNIQUE,
    job_uid text NOT NULL,
    attempt_number integer NOT NULL,
    replica_rank integer NOT NULL,
    stream text NOT NULL,
    first_line bigint NOT NULL,
    node text NOT NULL,
    time_ms bigint NOT NULL,
    dropped bigint NOT NULL,
    lines jsonb NOT NULL,
    PRIMARY KEY (job_uid, attempt_number, replica_rank, stream, first_line)
);
CREATE INDEX attempt_logs_tail ON attempt_logs (job_uid, seq DESC);

CREATE TABLE alerts (
    seq bigserial UNIQUE,
    source text NOT NULL,
    id text NOT NULL,
    type text NOT NULL,
    subject text NOT NULL,
    time_ms bigint NOT NULL,
    data jsonb NOT NULL,
    PRIMARY KEY (source, id)
);
