-- Begin a session as the next part of the group that its prompt fills, or of a new group; or find the one
-- that an equal request has begun.
-- KEYS[1] stream
-- ARGV    the call `OpenSession` of redrb/gateway/calls.py
-- Returns its reply. Repeated, it begins no second session.
--@include task facts sessions permissions

check_permissions(KEYS[1])
begin_writing()
local ask, rule = cmsgpack.unpack(ARGV[1]), rules()
if not rule.exists or rule.incarnation ~= ask.incarnation then
  return cmsgpack.pack({outcome = 'gone'})
end
local session, filling = key('session', ask.session), key('filling', ask.head.place)
local head = head_of(session)
if head and head.opener ~= ask.head.opener then
  redis.call('HSET', session, 'shared', 1)
elseif not head then
  local group = redis.call('GET', filling)
  local found = group and redis.call('HMGET', key('gathering', group), 'incarnation', 'series', 'right',
    'tags')
  if not found or found[1] ~= rule.incarnation or redis.call('HEXISTS', key('part_ends'), group) == 1 then
    if ask.right == '' and rule.max_staleness and rule.max_reads == 1 then
      return cmsgpack.pack({outcome = 'unadmitted'})
    end
    group, found = ask.group, {rule.incarnation, ask.series, ask.right, ask.tags}
    redis.call('HSET', key('gathering', group), 'incarnation', found[1], 'series', found[2], 'right',
      found[3], 'tags', found[4])
    redis.call('SET', filling, group)
    if ask.right ~= '' then
      --@include held_rights
      keep_right(ask.series, ask.right, HOLDER, 0)
    end
  end
  local count = redis.call('HINCRBY', key('gathering', group), 'next', 1)
  redis.call('HINCRBY', key('gathering', group), 'open', 1)
  head = ask.head
  head.group, head.index, head.incarnation = group, count - 1, found[1]
  head.series, head.right, head.tags = found[2], found[3], found[4]
  redis.call('HSET', session, 'head', cmsgpack.pack(head), 'turns', 0, 'bytes', 0)
  add(key('parts'), 'sessions', 1)
  redis.call('HSET', key('parts'), 'session_ms', ask.ttl_ms)
  local gone = redis.call('ZRANGEBYSCORE', key('sessions'), '-inf', string.format('%.0f', server_ms()),
    'LIMIT', 0, PAGE.sessions_forgotten)
  if #gone > 0 then
    redis.call('ZREM', key('sessions'), unpack(gone))
  end
  if count == head.size then
    redis.call('DEL', filling)
  end
end
renew(session, head, ask.ttl_ms)
return cmsgpack.pack({outcome = 'open', version = rule.version, is_new = head.opener == ask.head.opener,
  keeps_right = ask.right ~= '' and head.right == ask.right and head.series == ask.series})
