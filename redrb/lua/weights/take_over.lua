-- Make a publisher the owner: earlier publishers are fenced, and can commit nothing more.
-- KEYS[1] versions
-- ARGV    owner
-- Returns 'ok'
--@include weights

begin_writing()
redis.call('HSET', fence, 'owner', ARGV[1])
return 'ok'
