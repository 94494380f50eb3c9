-- Dead letters: groups that a consumer group gave up, in the stream `dead`, the oldest first.
--
-- letters:<group> sorts the ids of a consumer group's letters by the seq that each group had. A letter holds
-- what its group needs to be put again: its facts, the order that its score belongs to, and the status of its
-- pool.
-- Stages know a group by its first id, its source. One that was requeued has another id: its entry, and
-- a further letter of it, have the source in the field `s` or `source`. The sorted set buried has the
-- sources of all groups that were given up and may come back: those of letters by the letter's id, those
-- of requeued groups, until they are deleted, by the member.
--@include task facts

-- Delete a letter of a consumer group, by its id there. Returns 1, or 0 if it was deleted before.
local function delete_letter(id, group)
  redis.call('ZREM', key('buried'), id)
  redis.call('ZREM', key('letters', group), id)
  return redis.call('XDEL', key('dead'), id)
end

-- How many letters there are beyond `max_dead`.
local function excess_letters()
  local stored = redis.call('HMGET', task, 'max_dead', 'default_max_dead')
  local most = tonumber(stored[1] or stored[2] or '0')
  return most > 0 and redis.call('XLEN', key('dead')) - most or 0
end

local shed = 0 -- bytes of the letters that this script has read to delete them, less those that it has added

-- Delete the oldest letters beyond `max_dead`: a page, up to a page of bytes. They are read one by one, for
-- their consumer group, as each may be large. Returns whether there are more, which are left to the letters
-- that follow and to task/fill.
local function trim_letters()
  local excess, deleted = excess_letters(), 0
  while deleted < math.min(excess, PAGE.old_letters) and shed < PAGE.copied_bytes do -- bound: old_letters
    local entry, group = redis.call('XRANGE', key('dead'), '-', '+', 'COUNT', 1)[1], ''
    for i = 1, #entry[2], 2 do
      group = entry[2][i] == 'group' and entry[2][i + 1] or group
      shed = shed + #entry[2][i + 1]
    end
    deleted = deleted + delete_letter(entry[1], group)
  end
  add(task, 'dead_dropped', deleted)
  if deleted < excess then
    redis.call('HSET', task, 'shedding', '1')
  end
  return deleted < excess
end

-- Move a leased entry, already out of the pending list, to the dead-letter stream. `why` says how its last
-- delivery ended: the consumer, and the message and class of an exception ('' without one) or a reason.
-- `rejected`: this delivery has not failed.
local function add_dead_letter(group, seq, fields, why, reason, rejected)
  local member = member_of(seq)
  local failed = redis.call('HGET', key('deliveries', group), member) or '0'
  local packed = redis.call('HGET', key('facts'), member)
  local status = redis.call('HGET', key('moved', group), member)
    or packed and unpack_facts(packed).status or ''
  local letter = {'XADD', key('dead'), '*', 'seq', seq, 'group', group, 'reason', reason,
    'exception', why.exception or '', 'message', why.exception and why.exception ~= '' and why.text or '',
    'consumer', why.consumer, 'failed_deliveries', failed, 'deliveries', failed + (rejected and 1 or 0),
    'incarnation', rules().incarnation, 'facts', packed or '', 'order', rules().order, 'status', status}
  local payload, source = fields[2], fields[4]
  if source then
    letter[#letter + 1], letter[#letter + 2] = 'source', source
  end
  if payload then
    letter[#letter + 1], letter[#letter + 2] = 'g', payload
  end
  local id = redis.call(unpack(letter))
  redis.call('ZADD', key('letters', group), seq, id)
  redis.call('ZADD', key('buried'), source or seq, id)
  redis.call('HDEL', key('deliveries', group), member)
  add(key('group', group), 'dead', 1)
  shed = shed - #(payload or '') - #(packed or '')
  trim_letters()
end

-- The id of a consumer group's letter of a seq; nil if there is none.
local function letter_id(group, seq)
  return redis.call('ZRANGEBYSCORE', key('letters', group), seq, seq, 'LIMIT', 0, 1)[1]
end
