-- Let a session live on, or let it get no more turns, before the caller reads it.
-- KEYS[1] stream
-- ARGV    the call `UseSession` of redrb/gateway/calls.py
-- Returns its reply
--@include task sessions permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local session = key('session', ask.session)
local head = head_of(session)
if not head then
  return cmsgpack.pack({outcome = 'unknown'})
end
renew(session, head, ask.ttl_ms)
local ends = ask.ends and number(session, 'turns') > 0
if ends then
  redis.call('ZREM', key('sessions'), head.id)
end
return cmsgpack.pack({outcome = 'used',
  short = ends and leave(head, redis.call('HSETNX', session, 'over', 1) == 1)})
