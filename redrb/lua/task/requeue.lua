-- Put dead letters of a consumer group anew, for it alone: their groups get new ids, and with them new
-- places, and keep status, priority, versions, tags and first id. A claimed group whose rows were cleared
-- ends as evicted.
-- KEYS[1] stream
-- ARGV    the call `Requeue` of redrb/stream/task/calls.py
-- Returns its reply; there is more if it has read its bytes of letters, or has removed entries of failed
--         transactions. Repeated, it requeues none again.
--@include task put_record facts pools dead_letters puts waking consumption permissions

check_permissions(stream)
begin_writing()
local ask, letters, read, requeued = cmsgpack.unpack(ARGV[1]), {}, 0, {}
local group = ask.group
if not exists() then
  return cmsgpack.pack({more = false})
end

-- Read the letters that can be requeued, up to a page of bytes. Returns whether there may be more.
local function read_letters()
  for _, seq in ipairs(ask.seqs) do
    local id = letter_id(group, seq)
    if id and not letters[id] then
      if read >= PAGE.copied_bytes then
        return true
      end
      local entry = redis.call('XRANGE', key('dead'), id, id)[1] or {id, {}}
      local letter, bytes = {id = id, seq = seq}, 0
      for at = 1, #entry[2], 2 do
        letter[entry[2][at]], bytes = entry[2][at + 1], bytes + #entry[2][at + 1]
      end
      letter.first = counter(letter.source or seq)
      if letter.first and letter.status and letter.g and letter.facts and letter.facts ~= '' then
        letters[#letters + 1], letters[id], read = letter, true, read + bytes
      end
    end
  end
  return false
end

-- Both orders if a letter has the score of a former one, and scripts cannot compute that of this one; or nil.
local function unsortable()
  --@include scores
  local order = rules().order
  for _, letter in ipairs(scores_known(order) and {} or letters) do
    if letter.order ~= order then
      return {order, letter.order or ''}
    end
  end
end

local more = read_letters()
local refused = unsortable()
if refused then
  return cmsgpack.pack({unsortable = refused})
end
if remove_orphans(last_counted(), '+') then
  return cmsgpack.pack({more = true})
end

-- Put the group of a letter; returns its new seq.
local function put_again(letter, facts)
  facts.status, facts.first = letter.status, letter.first
  if letter.order ~= rules().order then
    --@include scores
    facts.score = score_by(rules().order, facts)
  end
  local first = string.format('%d', letter.first)
  local seq = seq_of(redis.call('XADD', stream, '*', 'g', letter.g, 's', first))
  local member = member_of(seq)
  redis.call('ZADD', key('buried'), first, member)
  redis.call('HSET', puts, 'last', string.format('%d', seq))
  store_facts(member, facts)
  note_seq(group, seq, facts)
  add(task, 'bytes', rules().max_bytes > 0 and facts.size or 0)
  enter(group, pool_of(group, letter.status), {member}, {facts})
  return seq
end

for _, letter in ipairs(letters) do
  local facts = unpack_facts(letter.facts)
  add(key('group', group), 'dead', -1)
  if has_its_rows(group, letter.seq, facts) then
    requeued[#requeued + 1] = {tonumber(letter.seq), put_again(letter, facts)}
  else
    add(key('group', group), 'evicted', 1)
  end
  delete_letter(letter.id, group)
end
wake_entered()
return cmsgpack.pack({more = more, ids = requeued})
