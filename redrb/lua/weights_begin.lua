-- Begin an attempt to publish: its token names its chunks, so that they are never another's.
-- KEYS[1] versions
-- ARGV    owner
-- Returns {'ok', token, newest version or 0} | {'fenced'}
--@ _weights

begin_writing()
redis.call('HSETNX', fence, 'owner', ARGV[1])
if redis.call('HGET', fence, 'owner') ~= ARGV[1] then
  return {'fenced'}
end
return {'ok', redis.call('HINCRBY', fence, 'token', 1), newest()}
