-- What a task that claims rows of a table notes there: its keys lie below those of the table, and the facts
-- of its groups hold the numbers of their rows. include/claims.lua says what claimed:<name> is.
--@include task facts

local CLAIMER = 'default' -- the consumer group of all claims

-- The prefix of the table whose rows this task claims, and the name of the task there; nil for other tasks.
local function claimed_table()
  return string.match(prefix, '^(.*}:)claims:(.*):$')
end

-- Note which rows the task has acknowledged, of those that are there.
local function note_consumed(seqs)
  local home, name = claimed_table()
  if not home or #seqs == 0 then
    return
  end
  local change, members, numbered, noted = redis.call('HGET', home .. 'task', 'change') or '0', {}, {}, {}
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  for _, facts in ipairs(facts_of_all(members)) do
    for _, row in ipairs(facts and facts.rows or {}) do
      numbered[#numbered + 1] = row
    end
  end
  for i, known in ipairs(replies_of('HMGET', home .. 'claimed:' .. name, numbered)) do
    if known then
      noted[#noted + 1], noted[#noted + 2] = change, numbered[i]
    end
  end
  in_parts('ZADD', home .. 'consumed:' .. name, noted)
end

-- The rows of a group that was claimed, none in other tasks, and the hash that says which group each is in.
local function rows_of(group, facts)
  local home, name = claimed_table()
  return home and group == CLAIMER and facts.rows or {}, (home or '') .. 'claimed:' .. (name or '')
end

-- Whether the rows of a dead letter are still in its group: none was cleared, or is in another one now.
local function has_its_rows(group, seq, facts)
  local numbered, claimed = rows_of(group, facts)
  for _, known in ipairs(replies_of('HMGET', claimed, numbered)) do
    if known ~= seq then
      return false
    end
  end
  return true
end

-- A group has got another seq, by which those find it who clear its rows.
local function note_seq(group, seq, facts)
  local numbered, claimed = rows_of(group, facts)
  local noted = {}
  for i, row in ipairs(numbered) do
    noted[2 * i - 1], noted[2 * i] = row, seq
  end
  in_parts('HSET', claimed, noted)
end
