-- Make a publisher the owner: the one before it can commit nothing more.
-- KEYS[1] versions
-- ARGV    owner
-- Returns 'ok'
--@include weights

begin_writing()
redis.call('HSET', fence, 'owner', ARGV[1])
return 'ok'
